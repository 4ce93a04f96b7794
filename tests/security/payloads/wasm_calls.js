// KIND …: what QuickJS's own libraries offer elsewhere, and what a runaway script does.
const at = scriptArgs.indexOf("--kind");
const [kind, arg] = scriptArgs.slice(at + 1);
const say = outcome => console.log("\n" + JSON.stringify({ outcome }));
const calls = {
  exec: () => os.exec(["true"]),
  popen: () => std.popen("true", "r"),
  worker: () => new os.Worker("./none.js"),
  kill: () => os.kill(1, 9),
  environment: () => { if (!JSON.stringify(std.getenviron()).includes(arg)) throw new Error("invisible"); },
  memory: () => { const kept = []; for (let n = 0; n < Number(arg); n++) kept.push(new Uint8Array(1 << 20).fill(1)); },
  deep: () => { const f = n => n ? f(n - 1) + 1 : 0; f(Number(arg)); },
  spin: () => { for (let n = 0; n < Number(arg) * 1e6; n++); },
};
try {
  const found = calls[kind]();
  say(typeof found == "number" && found < 0 ? "denied" : "succeeded");
} catch (error) {
  say(error instanceof TypeError || error instanceof ReferenceError ? "no-such-call"
    : error.message == "invisible" ? "invisible" : "contained:" + error.name);
}
