"""Search: trials whose values a sampler suggests, the rules that end them early, and the rules that continue them."""
