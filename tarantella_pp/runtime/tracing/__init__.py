"""What happened when: recorded steps, their costs, their trace, profiles."""
