// @ts-check
/** The Python that loads the recording and prints the numbers of the page. */

import { PANELS } from "./panels.js";

/** A text as Python writes it. @param {string} value */
const quoted = (value) => JSON.stringify(value);

/** @param {any} answer  the server's */
export function code(answer) {
  const names = PANELS.flatMap((panel) => panel.lines.map(([name]) => name)).filter((name) => answer.series[name]);
  const pairs = names.map((name) => name.split(".").map(quoted).join(", "));
  return [
    "import addnorm",
    "",
    `rec = addnorm.stream.Recording.load(${quoted(answer.path)})`,
    `step, stream = ${answer.last ? "rec.steps[-1]" : answer.step}, ${quoted(answer.stream)}`,
    "",
    "for role, statistic in [",
    ...pairs.map((pair) => `    (${pair}),`),
    "]:",
    '    print(f"\\n{role} {statistic}")',
    "    for site, value in rec.series(role, statistic, step=step, stream=stream):",
    '        print(f"{site.id:40} {value:.5g}")',
    "",
    'known = rec.metadata.get("streams", {}).get(stream)  # the wiring, and how well every equation closes',
    'print("\\nwiring", known["wiring"] if known else "not recorded")',
    "",
    "sheet = rec.balances.get(stream)",
    "if sheet is None or sheet.reason:",
    '    print("no balance:", sheet.reason if sheet else "not recorded")',
    "else:",
    "    sources, shares = rec.memory_maps[stream]",
    "    share = dict(zip(sources, shares[-1]))  # the mean over the tokens of <component, x> / |x|^2",
    "    for source, amount in zip(sheet.sources, sheet.amounts):",
    '        print(f"{source:40} {amount:10.5g} {share[source]:8.2%}")',
    '    print(f"norm of the stream {sheet.stream_norm:.6g}, error {sheet.error:.1e}")',
    "",
  ].join("\n");
}
