"""What a replica decides without touching disk, network or clock. Pure."""
