"""What a test of a service needs: a machine in memory, and time that does not pass by itself."""
