"""File formats and folders of the user: how facts and weights lie in them, whatever the model."""
