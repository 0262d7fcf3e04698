import hydra


@hydra.main(config_path="conf", config_name="config", version_base=None)
def main(cfg):
    pass
