"""Hosts, groups and variables, as Ansible itself resolves them."""
