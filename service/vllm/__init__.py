"""What the vLLM connector is made of; only ``service/vllm_connector.py`` imports vLLM itself."""
