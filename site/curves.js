// The curves of one environment, drawn with Plotly.
const form = document.getElementById("choice")
const recipes = document.getElementById("recipes")
const palette = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf"]
let data = null

async function load() {
  const chosen = form.env.value
  const found = await (await fetch(`curves/${chosen}.json`)).json()
  if (chosen !== form.env.value) return // another one in the meantime
  data = found
  recipes.querySelectorAll("label").forEach((label) => label.remove())
  const isChosen = data.ours.some((run) => run.colour) ? (run) => run.colour : (run, i) => i < 2
  data.ours.forEach((run, i) => {
    const label = document.createElement("label")
    const box = document.createElement("input")
    Object.assign(box, { type: "checkbox", name: "recipe", value: i, checked: isChosen(run, i) })
    const seeds = run.numbers.length > 1 ? `${run.numbers.length} seeds` : "one seed"
    label.append(box, ` ${run.label} (${seeds})`)
    recipes.append(label)
  })
  draw()
}

function shown() {
  const runs = []
  const boxes = [...form.querySelectorAll("[name=recipe]")]
  boxes.forEach((box) => box.checked ? runs.push(data.ours[box.value]) : delete data.ours[box.value].drawn)
  for (const run of runs) { // a colour that no other has, as long as there are enough
    const taken = runs.map((other) => other.drawn || other.colour)
    run.drawn ||= run.colour || palette.find((colour) => !taken.includes(colour)) || "#888888"
  }
  boxes.forEach((box) =>
    box.parentElement.style.setProperty("--colour", data.ours[box.value].drawn || "transparent"))
  return runs
}

function traces() {
  const axis = form.axis.value
  const found = []
  const line = (x, y, name, colour, more) =>
    found.push({ x, y, name, mode: "lines", line: { color: colour, ...more.line }, ...more.trace })
  shown().forEach((run) => {
    const { x, mean, low, high, seeds } = run[axis]
    if (form.show.value === "band" && low) {
      const quiet = { showlegend: false, hoverinfo: "skip" }
      line(x, low, run.label, run.drawn, { line: { width: 0 }, trace: quiet })
      line(x, high, run.label, run.drawn, {
        line: { width: 0 }, trace: { ...quiet, fill: "tonexty", fillcolor: `${run.drawn}33` } })
    } else if (seeds.length > 1) {
      seeds.forEach((y, i) => line(x, y, `${run.label}, seed ${run.numbers[i]}`, run.drawn, {
        line: { width: 1 }, trace: { showlegend: false, opacity: 0.6 } }))
    }
    line(x, mean, run.label, run.drawn, { line: { width: 2.5 }, trace: {} })
  })
  const end = Math.max(...data.ours.map((run) => run[axis].x.at(-1)))
  data.lines.forEach(({ label, mean }, i) =>
    line([0, end], [mean, mean], label, `hsl(${70 * i}, 45%, 50%)`, { line: { dash: "dash" }, trace: {} }))
  if (axis === "step") data.points.forEach(({ label, x, y }, i) =>
    line(x, y, label, ["#17becf", "#bcbd22"][i % 2], { line: { dash: "dash" }, trace: { mode: "lines+markers" } }))
  return found
}

function draw() {
  const style = getComputedStyle(document.body)
  const text = style.getPropertyValue("--md-default-fg-color")
  const grid = style.getPropertyValue("--md-default-fg-color--lightest")
  const axis = { gridcolor: grid, zerolinecolor: grid }
  const title = form.axis.value === "step" ? "environment steps (millions)" : "minutes of training"
  const narrow = window.innerWidth < 600
  Plotly.react("plot", traces(), {
    font: { color: text, family: "inherit" }, modebar: { bgcolor: "transparent", color: text },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    xaxis: { ...axis, title: { text: title }, rangemode: "tozero" },
    yaxis: { ...axis, title: { text: "return" }, automargin: true },
    margin: { l: narrow ? 40 : 60, r: 10, t: 30, b: 60 }, height: 560,
    legend: { orientation: "h", y: -0.18 }, hovermode: "closest", hoverlabel: { namelength: -1 },
  }, { responsive: true, displaylogo: false, showSendToCloud: false })
}

form.env.addEventListener("change", load)
form.addEventListener("change", (event) => event.target !== form.env && data && draw())
new MutationObserver(() => data && draw()).observe(document.body, { attributeFilter: ["data-md-color-scheme"] })
load()
