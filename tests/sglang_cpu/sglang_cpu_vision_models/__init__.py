"""The models of SGLang that tests with images use."""
