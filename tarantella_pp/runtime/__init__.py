"""From a plan to training: schedule, messages, stages and the loop that runs one rank's part."""
