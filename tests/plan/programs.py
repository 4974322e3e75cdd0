"""A small program, as the compiler writes it: a ring of four in a loop, and what comes home after it."""

KERNEL = 'custom_call_target="tpu_custom_call"'
UP = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
DOWN = "source_target_pairs={{0,3},{1,0},{2,1},{3,2}}"
PART = "bf16[1,8,128]{2,1,0:T(8,128)(2,1)}"
MOVING = f"({PART}, {PART}, u32[]{{:S(2)}}, u32[]{{:S(2)}})"
STATE = f"(s32[]{{:T(128)}}, {PART}, {PART})"
BACK = 'metadata={op_name="jit(f)/transpose(jvp(attention))/ppermute"}'

RING = f"""HloModule jit_f, is_scheduled=true, entry_computation_layout={{({PART})->{PART}}}, num_partitions=4

%joined (a: bf16[1,4,128], b: bf16[1,4,128]) -> bf16[1,8,128] {{
  %a = bf16[1,4,128]{{2,1,0}} parameter(0)
  %b = bf16[1,4,128]{{2,1,0}} parameter(1)
  %zero = bf16[] constant(0)
  %pad.1 = {PART} pad(%a, %zero), padding=0_0x0_4x0_0
  %pad.2 = {PART} pad(%b, %zero), padding=0_0x4_0x0_0
  ROOT %both = {PART} maximum(%pad.1, %pad.2)
}}

%scaled (a: bf16[1,8,128]) -> bf16[1,8,128] {{
  %a.1 = {PART} parameter(0)
  ROOT %twice = {PART} add(%a.1, %a.1)
}}

%body (state: (s32[], bf16[1,8,128], bf16[1,8,128])) -> (s32[], bf16[1,8,128], bf16[1,8,128]) {{
  %state = {STATE} parameter(0)
  %at = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %x = {PART} get-tuple-element(%state), index=1
  %y = {PART} get-tuple-element(%state), index=2
  %collective-permute-start.1 = {MOVING} collective-permute-start(%x), channel_id=1, {UP}
  %collective-permute-start.2 = {MOVING} collective-permute-start(%y), channel_id=1, {DOWN}
  %ringflash_forward.10 = ({PART}, /*index=1*/{PART}) custom-call(%x, %y), {KERNEL}, frontend_attributes={{
"xprof": "a line of its own"
}}, metadata={{op_name="jit(f)/jvp(attention)/while/body/ringflash_forward/pallas_call"}}
  %collective-permute-done.1 = {PART} collective-permute-done(%collective-permute-start.1)
  %collective-permute-done.2 = {PART} collective-permute-done(%collective-permute-start.2)
  %copy.5 = {PART} copy(%collective-permute-done.2)
  ROOT %next = {STATE} tuple(%at, %collective-permute-done.1, %copy.5)
}}

%condition (state: (s32[], bf16[1,8,128], bf16[1,8,128])) -> pred[] {{
  %state.1 = {STATE} parameter(0)
  %at.1 = s32[]{{:T(128)}} get-tuple-element(%state.1), index=0
  %limit = s32[]{{:T(128)}} constant(3)
  ROOT %less = pred[]{{:T(512)}} compare(%at.1, %limit), direction=LT
}}

ENTRY %main (x: bf16[1,8,128]) -> bf16[1,8,128] {{
  %x.1 = {PART} parameter(0), metadata={{op_name="x"}}
  %start = s32[]{{:T(128)}} constant(0)
  %start.1 = s32[]{{:T(128)}} copy(%start)
  %copy-start = ({PART}, {PART}, u32[]{{:S(2)}}) copy-start(%x.1)
  %copy-done = {PART} copy-done(%copy-start)
  %tuple.1 = {STATE} tuple(%start.1, %x.1, %copy-done)
  %while.1 = {STATE} while(%tuple.1), condition=%condition, body=%body
  %z = {PART} get-tuple-element(%while.1), index=1
  %collective-permute-start.3 = {MOVING} collective-permute-start(%z), channel_id=1, {UP}, {BACK}
  %pad_maximum_fusion = {PART} fusion(%z, %z), kind=kLoop, calls=%joined
  %add_fusion = {PART} fusion(%z), kind=kLoop, calls=%scaled
  ROOT %collective-permute-done.3 = {PART} collective-permute-done(%collective-permute-start.3)
}}
"""


def entered(*lines: str, before: str = "", devices: int = 8) -> str:
    """A program of these instructions."""
    body = "\n".join(f"  {line}" for line in lines)
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={devices}"
    return f"{head}\n\n{before}\n\nENTRY %main (x: f32[8,128]) -> f32[8,128] {{\n{body}\n}}\n"
