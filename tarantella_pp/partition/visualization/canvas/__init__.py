"""Elements of pictures: markup, colours, style sheets, labels."""
