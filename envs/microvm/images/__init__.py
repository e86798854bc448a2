"""What lies above the base image: layers, where they are cached, and which of them a host has."""
