"""What requests and answers contain."""
