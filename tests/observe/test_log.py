import logging

from ringflash.observe.log import logged


def test_everything_goes_to_the_file_and_warnings_to_the_terminal(tmp_path, capsys):
    log = logging.getLogger("ringflash.some.part")
    with logged(tmp_path):
        log.info("which kernel serves")
        log.warning("a step is passed over")
        logging.getLogger("another").warning("not ours")
    said = capsys.readouterr().err
    assert "a step is passed over" in said
    assert "kernel" not in said
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO ringflash.some.part: which kernel serves",
        "WARNING ringflash.some.part: a step is passed over",
    ]


def test_it_appends_and_puts_everything_back(tmp_path):
    logger = logging.getLogger("ringflash")
    for text in ("one", "two"):
        with logged(tmp_path):
            logger.info(text)
    logger.info("three")
    assert (logger.level, logger.propagate, logger.handlers) == (logging.NOTSET, True, [])
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(": ")[1] for line in lines] == ["one", "two"]
