"""Headrace inside other libraries: `headrace.integrations.transformers`."""
