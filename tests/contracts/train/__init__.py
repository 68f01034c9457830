"""How training engines are built for their contract: `factory(model_folder)`, with a vocabulary of worlds.VOCAB."""
