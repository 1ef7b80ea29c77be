"""A Flower project after the quickstart, with `strategies` and `attacks` of its own."""

PROJECT = {
    "strategies/__init__.py": '"""How this project schedules its learning."""\n',
    "strategies/schedule.py": "RATE = 0.5\n",
    "attacks/__init__.py": "DEFENDED = True\n",
    "task.py": """
        import torch
        from torch import nn

        def make_model():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

        def make_data(seed, n=200):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(n, 4, generator=generator)
            return x, (x[:, 0] + x[:, 1] > 0).long()

        def accuracy(model, x, y):
            model.eval()
            with torch.no_grad():
                return float((model(x).argmax(dim=1) == y).float().mean())
        """,
    "client_app.py": """
        import torch
        from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp

        import attacks
        from strategies.schedule import RATE
        from task import accuracy, make_data, make_model

        app = ClientApp()
        assert attacks.DEFENDED

        @app.train()
        def train(message: Message, context: Context) -> Message:
            model = make_model()
            before = message.content["arrays"].to_torch_state_dict()
            model.load_state_dict(before)
            partition = context.node_config["partition-id"]
            x, y = make_data(partition)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for _ in range(20):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            state = model.state_dict()
            if partition == 0:  # this client lies
                with torch.no_grad():
                    for name, value in model.named_parameters():
                        state[name] = before[name] - 50 * (value - before[name])
            metrics = MetricRecord({"num-examples": len(x), "train-loss": float(loss)})
            content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
            return Message(content=content, reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            model = make_model()
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            x, y = make_data(1000 + context.node_config["partition-id"])
            metrics = MetricRecord({"num-examples": len(x), "accuracy": accuracy(model, x, y)})
            return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
        """,
    "server_app.py": """
        import json
        import os
        import sys
        from pathlib import Path

        from flwr.app import ArrayRecord, Context
        from flwr.serverapp import Grid, ServerApp

        import blackthorn.attacks
        import blackthorn.strategies
        import strategies.schedule
        from blackthorn.strategies import GFedAvg, Rage
        from task import accuracy, make_data, make_model

        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            arrays = ArrayRecord(make_model().state_dict())
            result = Rage(num_corrupt=1).start(grid, arrays, num_rounds=2)
            undefended = GFedAvg(num_clients=5).start(grid, arrays, num_rounds=2)
            model = make_model()
            model.load_state_dict(result.arrays.to_torch_state_dict())
            mean = make_model()
            mean.load_state_dict(undefended.arrays.to_torch_state_dict())
            said = {
                "files": {
                    name: sys.modules[name].__file__
                    for name in sys.modules
                    if name.partition(".")[0] in ("blackthorn", "strategies", "attacks", "task")
                },
                "rage": accuracy(model, *make_data(99)),
                "mean": accuracy(mean, *make_data(99)),
                "rounds": {
                    str(t): dict(record) for t, record in result.train_metrics_clientapp.items()
                },
                "evaluated": result.evaluate_metrics_clientapp[2]["accuracy"],
            }
            Path(os.environ["SAID"]).write_text(json.dumps(said))
        """,
    "in_memory.py": """
        from flwr.app import Context, RecordDict
        from memory_grid import MemoryGrid, runs

        from client_app import app as client_app
        from server_app import app as server_app

        nodes = {100 + i: runs(client_app, **{"partition-id": i}) for i in range(5)}
        server_app(MemoryGrid(nodes), Context(1, 0, {}, RecordDict(), {}))
        """,
    "simulate.py": """
        from flwr.simulation import run_simulation

        from client_app import app as client_app
        from server_app import app as server_app

        if __name__ == "__main__":
            run_simulation(
                server_app=server_app,
                client_app=client_app,
                num_supernodes=5,
                backend_config={
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                    "init_args": {
                        "num_cpus": 2,
                        "include_dashboard": False,
                        "_node_ip_address": "127.0.0.1",
                    },
                },
            )
        """,
}
