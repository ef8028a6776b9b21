"""The cases, by topic. Each module is a mix-in; :class:`weightwire.testing.BackendSuite` is all of them."""
