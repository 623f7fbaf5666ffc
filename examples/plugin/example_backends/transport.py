"""A transport: all-gather to dispatch, all-to-all and a float32 sum over ranks to combine."""

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities
from ep_moe.parallel.rank_group import all_to_all_rows, gather_rows
from ep_moe.types import LocalIds, Pending, Received


class GatherSumDispatcher(Dispatcher):
    name = "gather_sum"
    capabilities = DispatcherCapabilities(dedup=True, deterministic=True, differentiable=True)

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        if problem is not None:  # raises on all ranks; the other arguments may be malformed
            self.rank_group.agree([0, 0], problem, x.device)
        gradients = {"x": x, "routing.weights": routing.weights}
        rows = self.rank_group.agree([len(x), self._out_of_range(routing)], None, x.device, gradients=gradients)
        self._check_ids([row[1] for row in rows])
        counts = [row[0] for row in rows]
        started = [gather_rows(tensor, counts, self.rank_group) for tensor in (x, routing.ids, routing.weights)]

        def finish():
            x, ids, weights = (pending.wait() for pending in started)
            local = ids - self.rank_group.rank * self.dispatch_shape.slots_per_rank
            local = local.masked_fill((local < 0) | (local >= self.dispatch_shape.slots_per_rank), -1)
            layout, weighting = self.capabilities.layout, self.capabilities.weighting
            return Received(x, layout, weighting, handle=counts, local_ids=LocalIds(local), weights=weights)

        return Pending(finish)

    def _combine(self, y, handle, out):
        ranks, own = self.rank_group.size, handle[self.rank_group.rank]
        parts = all_to_all_rows(y, handle, [own] * ranks, self.rank_group)
        return Pending(lambda: parts.wait().view(ranks, own, y.shape[1]).float().sum(0).to(y.dtype))
