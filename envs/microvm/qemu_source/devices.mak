# All that QEMU's microvm machines get here; each further device is work at every start.
CONFIG_MICROVM=y
CONFIG_VIRTIO_BLK=y
CONFIG_VIRTIO_SERIAL=y
