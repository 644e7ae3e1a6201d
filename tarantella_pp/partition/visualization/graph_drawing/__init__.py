"""The picture of a layer graph: boxes, links, cuts, their layout."""
