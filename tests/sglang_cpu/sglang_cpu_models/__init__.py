"""The models of SGLang that tests use."""
