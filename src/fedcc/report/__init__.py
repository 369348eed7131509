"""Tables and figures: pure functions of what run folders hold."""
