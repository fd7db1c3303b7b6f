"""How hardware computes it: one Amaranth component per golden function, built from the same configuration."""
