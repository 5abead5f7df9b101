"""Generates systemd units, Kubernetes manifests and Dockerfiles with consistent timeouts."""
