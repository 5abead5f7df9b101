"""The data and actions of the HTTP endpoint, from the run itself and from its store.

Results are plain data of the same form as the command line's `--json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from gracekit.config.live import LiveSettings
from gracekit.config.settings import variable_name
from gracekit.control.accounts import OPERATOR
from gracekit.control.facts import StoreFacts
from gracekit.control.gauges import Gauges
from gracekit.control.health import Health, HealthCheck, Probe
from gracekit.control.orders import VerbAnswer
from gracekit.control.verbs import Control
from gracekit.errors import GracekitError, InvalidArgumentsError, NoSuchLease
from gracekit.leasing import Leases
from gracekit.listings.chosen_task import ChosenTask, find
from gracekit.listings.lease_list import LeaseInfo
from gracekit.listings.one_task import read_task
from gracekit.listings.parked_list import list_parked
from gracekit.listings.run_list import exit_as_json, list_exits, look
from gracekit.listings.store_view import Reports, RunReport, StoreView, list_incidents
from gracekit.listings.task_list import TaskQuery, list_tasks
from gracekit.runs.run import Run
from gracekit.telemetry.readings import Readings

NOT_ASKED: Final = RunReport(brief="not asked: its own endpoint or `gracekit status` answers")


class NoSuchTaskError(GracekitError):
    """The id names no task, or several."""


class MovedError(GracekitError):
    """Another run owns the task, or no run does."""


class AdminApi:
    """The listings and actions that one run offers to operators.

    Attributes:
        run_id: The run's id; an action must name it.
    """

    def __init__(
        self,
        run_id: str,
        control: Control,
        health: HealthCheck,
        gauges: Gauges,
        facts: StoreFacts,
        view: StoreView,
        settings: LiveSettings,
        leases: Leases,
        *,
        store: str,
    ) -> None:
        self.run_id = run_id
        self._control = control
        self._health = health
        self._gauges = gauges
        self._facts = facts
        self._view = view
        self._settings = settings
        self._store = store
        self._leases = leases

    # -- listings -------------------------------------------------------------------------

    async def probe(self, probe: Probe) -> Health:
        """The answer to one probe."""
        return await self._health.ask(probe)

    async def readings(self) -> Readings:
        """The gauges of `/metrics`; returns within 2 seconds, even if the store hangs."""
        await self._facts.measure()
        return self._gauges.read()

    async def own_status(self) -> VerbAnswer:
        """This run's status, with the first page of its tasks; does not read the store."""
        return await self._verb("status")

    async def status(self, limit: int) -> dict[str, Any]:
        """The runs of the store, with this run's own status.

        The accounts are those of the last count; None before the first count has ended. *limit* is
        for instances that ended lately, as in `look`.
        """
        reports = {self.run_id: RunReport(answer=await self.own_status())}
        accounts = await self._facts.accounts.fresh(OPERATOR)
        seen = await look(
            self._view,
            reports,
            store=self._store,
            accounts=accounts,
            limit=limit,
            unheard=NOT_ASKED,
        )
        return seen.as_json()

    async def tasks(self, query: TaskQuery) -> dict[str, Any]:
        """Tasks of the store, with live details of those that this run has in flight."""
        listed = await list_tasks(self._view, await self._reports(), query)
        return listed.as_json()

    async def pending(self, service: str | None, limit: int) -> dict[str, Any]:
        """Parked tasks of one service, or of all, the oldest deadline first."""
        return (await list_parked(self._view, service, limit=limit)).as_json()

    async def task(self, task_id: str) -> dict[str, Any]:
        """The full record of one task.

        Raises:
            NoSuchTaskError: the id names no task, or several.
        """
        subject = await self._chosen(task_id)

        async def hear(run: Run) -> RunReport:
            if run.run_id != self.run_id:
                return NOT_ASKED
            asked = {"task_id": subject.request_id, "recipient": subject.recipient}
            answer = await self._verb("status", asked)
            return RunReport(answer=answer, tasks=answer["tasks"])

        return (await read_task(self._view, subject, hear)).as_json()

    async def hosts(self) -> dict[str, Any]:
        """The newest run of each instance, with what this run has seen of its beats."""
        return {"hosts": [one.as_json() for one in await self._leases.hosts()]}

    async def leases(self, kind: str, resource_id: str, limit: int) -> dict[str, Any]:
        """The lease of that kind and id; without both, the declared ones of that kind and behind.

        Raises:
            NoSuchLease: no lease can have that name.
        """
        found: Sequence[LeaseInfo]
        if kind and resource_id:
            try:
                found = [await self._leases.status(kind, resource_id)]
            except InvalidArgumentsError as error:
                raise NoSuchLease(str(error)) from error
        else:
            found = await self._leases.list(after=(kind, ""), limit=limit)
        return {"leases": [one.as_json() for one in found]}

    async def exits(self, limit: int) -> dict[str, Any]:
        """The last runs that ended, newest first."""
        ended = await list_exits(self._view, limit=limit)
        return {"exits": [exit_as_json(run) for run in ended]}

    async def incidents(self, kind: str, limit: int) -> dict[str, Any]:
        """The last incidents whose kind begins with *kind*, newest first."""
        return {"incidents": await list_incidents(self._view, kind, limit=limit)}

    async def accounts(self) -> dict[str, Any]:
        """Whether every accepted request is accounted for, from the last count.

        Raises:
            StoreError: nothing was counted yet, and the store cannot be read.
        """
        return (await self._facts.accounts.first()).as_json()

    async def dump(self) -> dict[str, Any]:
        """The tasks in flight and the stacks of the process, as SIGUSR1 writes them."""
        return {"text": (await self._verb("dump"))["text"]}

    async def config(self) -> dict[str, Any]:
        """Every setting of this run with its origin; no secrets."""
        return {
            "settings": [
                {"setting": n, "value": v, "origin": o, "variable": variable_name(n)}
                for n, v, o in self._settings.now.describe()
            ]
        }

    # -- actions --------------------------------------------------------------------------

    async def act(self, verb: str, run_id: object, args: Mapping[str, Any]) -> VerbAnswer:
        """Carry out a verb on this run.

        Raises:
            GracekitError: as `Control.carry_out`.
        """
        return await self._control.carry_out(verb, run_id, args)

    async def lease(self, verb: str, run_id: object, args: Mapping[str, Any]) -> dict[str, Any]:
        """Declare a lease, or remove its declaration.

        Raises:
            GracekitError: as `Leases.create` and `Leases.delete`.
        """
        if run_id != self.run_id:
            raise MovedError("another run answers here now: look again, and ask it")
        kind, name = args["kind"], args["id"]
        if verb == "create":
            await self._leases.create(kind, name, payload=args.get("payload"))
        else:
            await self._leases.delete(kind, name)
        return (await self._leases.status(kind, name)).as_json()

    async def order(self, verb: str, run_id: object, args: Mapping[str, Any]) -> VerbAnswer:
        """Carry out an order about a task of this run, or about one without an owner.

        Raises:
            InvalidArgumentsError: the verb needs a reason, and *args* have none.
            NoSuchTaskError: the id names no task, or several.
            MovedError: another run owns the task.
            GracekitError: as `Control.carry_out`.
        """
        if verb != "retry" and not str(args.get("reason") or "").strip():
            raise InvalidArgumentsError(f"{verb!r} needs a reason, which the task's caller reads")
        answer = await self._control.carry_out(verb, run_id, args)
        if not answer.get("moved"):
            return answer
        chosen = await self._chosen(str(args["task_id"]))
        if chosen.request_id != args["task_id"]:  # only the beginning of the id was given
            named = {"task_id": chosen.request_id, "recipient": chosen.recipient}
            answer = await self._control.carry_out(verb, run_id, {**args, **named})
            if not answer.get("moved"):
                return answer
        raise MovedError(
            f"{chosen} is {chosen.state}{chosen.where} and not this run's to {verb} now: ask the "
            "run that has it, or try again if none has"
        )

    async def _chosen(self, task_id: str) -> ChosenTask:
        """The task with that id, or the only one whose id begins with it."""
        try:
            return await find(self._view, task_id, None, self._reports)
        except GracekitError as error:
            raise NoSuchTaskError(str(error)) from error

    # -- reports of the run itself --------------------------------------------------------

    async def _verb(self, name: str, args: Mapping[str, Any] = MappingProxyType({})) -> VerbAnswer:
        return await self._control.carry_out(name, self.run_id, args)

    async def _reports(self) -> Reports:
        """This run's report with all its tasks in flight; for others, that they were not asked."""
        answer = page = await self._verb("status")
        tasks = [*page["tasks"]]
        while page["next"] is not None:
            page = await self._verb("status", {"after": page["next"]})
            tasks += page["tasks"]
        others = {run.run_id: NOT_ASKED for run in await self._view.living()}
        return {**others, self.run_id: RunReport(answer=answer, tasks=tasks)}
