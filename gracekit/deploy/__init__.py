"""What platforms are given to run a service: units, manifests, images, with numbers that fit."""
