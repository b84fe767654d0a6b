"""Rules that look at a run while it goes on: alarms, advice and the monitor that feeds them. No torch."""
