"""Who will stop the service and how: systemd, supervisord, Kubernetes, shells, containers."""
