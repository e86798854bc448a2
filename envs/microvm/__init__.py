"""MicroVM backends, images, the guest agent and the VM pool."""
