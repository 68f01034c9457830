"""WebShop (Yao et al., arXiv 2207.01206): search and click over a catalogue, and buy what an instruction asks for."""
