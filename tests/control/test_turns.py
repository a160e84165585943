"""So many in one turn of the loop, and the others after them."""

import asyncio

from sidecar.control.turns import Turns


async def test_a_turn_has_room_for_a_few_and_the_others_follow_in_order() -> None:
    turns, went = Turns(3), list[tuple[int, int]]()
    turn = 0

    async def go(number: int) -> None:
        await turns.mine()
        went.append((number, turn))

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(go(number))
        while len(went) < 10:
            await asyncio.sleep(0)
            turn += 1
    assert [number for number, _ in went] == list(range(10))
    in_turn = [at for _, at in went]
    assert max(in_turn.count(at) for at in in_turn) == 3


async def test_who_is_alone_waits_for_nobody() -> None:
    turns = Turns(1)
    for _ in range(3):
        going = turns.mine()
        try:
            going.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)


async def test_who_is_cancelled_takes_nobodys_place() -> None:
    turns, went = Turns(1), list[int]()

    async def go(number: int) -> None:
        await turns.mine()
        went.append(number)

    tasks = [asyncio.get_running_loop().create_task(go(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert went == [0, 2, 3]
    async with asyncio.timeout(1):
        await turns.mine()
