// PATH MARKER: reads a file of the host, as far as QuickJS has ways.
const [path, marker] = scriptArgs.slice(-2);
const up = "../".repeat(24), leaf = path.replace(/^\/+/, "");
const seen = new Set();
const look = name => {
  const file = std.open(name, "r");
  if (!file) { seen.add("invisible"); return; }
  const text = file.readAsString();
  seen.add(text.includes(marker) ? "succeeded" : "different");
  file.close();
};
for (const way of [path, "//" + leaf, up + leaf, "/workspace/" + up + leaf, "/proc/self/root" + path]) look(way);
for (const [n, target] of [path, up + leaf, "/"].entries()) {
  try { if (os.symlink(target, "rf-js" + n) == 0) { look("rf-js" + n); look("rf-js" + n + "/" + leaf); } } catch (e) {}
}
try { const text = std.loadFile(path); if (text && text.includes(marker)) seen.add("succeeded"); } catch (e) {}
console.log("\n" + JSON.stringify({ outcome: seen.has("succeeded") ? "succeeded" : [...seen].sort().join("+") }));
