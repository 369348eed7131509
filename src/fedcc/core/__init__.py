"""The vocabulary that methods, engines and transports share. It imports torch and numpy only."""
