"""Figures beside the peers', as ratios of one run on one machine."""
