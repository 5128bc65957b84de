"""Modules that an env server finds by id: the environments, the harness and the renderer.

This folder is on an env server's import path, so that verifiers resolves 'reverse-text' to the
top-level module `reverse_text`. Nothing here may import a worker-side room but
`ratchet.activities.envs.datasets`.
"""
