"""Ways to take a host out of service and back."""
