"""WebShop (Yao et al., arXiv 2207.01206): search and click in a catalogue, and buy the product of an instruction."""
