"""Whole models as files: opening them, quantising and exporting them, making random ones."""
