"""The dashboard: static pages that read the REST API from the browser."""
