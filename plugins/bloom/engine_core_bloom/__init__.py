"""BLOOM and BLOOMZ for engine-core."""
