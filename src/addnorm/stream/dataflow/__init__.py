"""A run of a model as data, and runs that are listened to."""
