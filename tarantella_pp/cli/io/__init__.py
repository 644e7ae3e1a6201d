"""What the subcommands read and write: models, plans, quantities, tables, pictures."""
