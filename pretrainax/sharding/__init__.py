"""Where arrays live: the mesh, the rules from parameter paths to PartitionSpecs, batches and activations."""
