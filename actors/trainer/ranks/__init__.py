"""Training on several processes of torch.distributed, with the bits of one.

Weights, gradients and moments are sharded over the ranks (FSDP2); every rank takes the same steps
of the same manifests. In each round a rank computes one micro-batch, and gradients are added in the
order of the micro-batches, so that the number of ranks changes the time and no bit.
"""
