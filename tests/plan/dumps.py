"""A small dump, as the compiler writes it: a loop over the grid, a body, and what starts it."""

UTILIZATION = """== CAPACTIY:
MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
"""
QUIET = "0 0 0 0 0 0 0 0 0 0 1"
STORE = "0 0 0 0 0 0 0 0 2 0 0"
PRODUCT = "2 1 0 4 0 0 3 1 2 1 0"

# bundle: what it does. Each branch has four delay slots.
CODE = {
    0x0: "{ %s1 = smov.u32 0 }",
    0x2: "{ %22 = vsyncpa [#allocation6], 0 } /* Start region 1 */",
    0x3: "{ %459 = sbr.rel (%p0) target bundleno = 11 (0xb), region = 32  ;;  %s3 = sld [smem:[#a1]] }",
    0x8: "{ %833 = vst [vmem:[#allocation12] sm:$0xff] } /* a comment over\ntwo lines, Start region 3 */",
    0xC: "{ %990 = sbr.rel (%p1) target bundleno = 23 (0x17), region = 52 }",
    0x18: "{ %37 = sbr.rel (!%p5) target bundleno = 2 (0x2), region = 137 }",
}
KEYS = {0x2: "LB:", 0xB: "PF:", 0x17: "PF:"}
LENGTH = 32
ALLOCATIONS = """  #allocation1 [shape = 's32[1]{0}', space=sflag, size = 0x4, offset = 0x900000, scoped]
    #allocation5 [shape = 'u8[524288]{0}', space=vmem, size = 0x80000, offset = 0, scoped, tag = 'in']
    #allocation9 [shape = 'u8[4096]{0}', space=vmem, size = 4096, offset = 0x80000, scoped]
"""


def write(folder, *, kernel="fwd.1", stamp=179):
    """The files of one kernel."""
    rows = [QUIET] * LENGTH
    rows[8:11] = [STORE] * 3
    rows[17:23] = [PRODUCT] * 6
    stem = f"{stamp}-{kernel}-"
    (folder / f"{stem}68-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(
        UTILIZATION + "\n".join(rows) + "\n"
    )
    lines = ["LB: loop body", ""]
    for n in range(LENGTH):
        number = hex(n) if n else "0"
        lines.append(f"{number:>6} {KEYS.get(n, '  :')} > {CODE.get(n, '{}')}")
    (folder / f"{stem}65-packed-bundles-post-ra.txt").write_text("\n".join(lines))
    (folder / f"{stem}64-schedule-analysis_packed-bundles-post-ra.txt").write_text("Schedule\n")
    (folder / f"{stem}66-post-bundle-packing-post-ra.txt").write_text(ALLOCATIONS)
