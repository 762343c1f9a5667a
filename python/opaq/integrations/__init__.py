"""Integrations with other libraries. Each file is imported only if its library is used."""
