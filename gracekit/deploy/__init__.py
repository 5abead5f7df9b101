"""The units, manifests and Dockerfiles by which platforms run a service, with numbers that fit."""
