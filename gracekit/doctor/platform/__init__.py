"""Checks of the platform that stops the service: systemd, supervisord, Kubernetes, containers."""
