"""The adaptivespec command: set-up, demo, measurements."""
