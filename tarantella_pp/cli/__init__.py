"""The command line: launch a script on several ranks, make and show plans, check the machine."""
