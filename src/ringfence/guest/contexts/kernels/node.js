// The JavaScript kernel: runs inside a sandbox, keeps variables between calls, answers in lines of JSON.
// Node 14 or newer, nothing else. Requests come on descriptor 4, answers go to descriptor 3; what children write
// to descriptors 1 and 2 goes to the host as it is.
'use strict';
const fs = require('fs'), net = require('net'), util = require('util'), vm = require('vm');
const CHUNK = 16384, MOST_TEXT = 4 * 1024 * 1024;
const MIMES = {
  'text/plain': 'text', 'text/html': 'html', 'text/markdown': 'markdown', 'image/svg+xml': 'svg', 'image/png': 'png',
  'image/jpeg': 'jpeg', 'application/pdf': 'pdf', 'text/latex': 'latex', 'application/json': 'json',
  'application/javascript': 'javascript',
};
const pause = new Int32Array(new SharedArrayBuffer(4));
let call = '', count = 0, interrupted = null;

function send(text) {
  let data = Buffer.from(text + '\n');
  while (data.length) {
    try {
      data = data.subarray(fs.writeSync(3, data));
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(pause, 0, 0, 5);
    }
  }
}

function say(kind, fields) {
  const text = JSON.stringify(Object.assign({}, fields, { t: kind, x: call }));
  if (text.length <= CHUNK) return send(text);
  for (let at = 0; at < text.length; at += CHUNK) {
    const kindOfPiece = at + CHUNK >= text.length ? 'last' : 'part';
    send(JSON.stringify({ t: kindOfPiece, x: call, d: text.slice(at, at + CHUNK) }));
  }
}

function cut(text) {
  return text.length <= MOST_TEXT ? text : text.slice(0, MOST_TEXT) + `… (${text.length - MOST_TEXT} characters more)`;
}

for (const kind of ['stdout', 'stderr']) {
  const stream = process[kind];
  stream.write = (data, encoding, done) => {
    if (typeof encoding === 'function') [encoding, done] = [undefined, encoding];
    const text = typeof data === 'string' ? data : Buffer.from(data).toString('utf8');
    for (let at = 0; at < text.length; at += CHUNK / 2) say(kind, { s: text.slice(at, at + CHUNK / 2) });
    if (typeof done === 'function') process.nextTick(done);
    return true;
  };
}

function represent(value) {
  const shown = {};
  const rich = value !== null && typeof value === 'object' && value[Symbol.for('Jupyter.display')];
  if (typeof rich === 'function') {
    const bundle = rich.call(value) || {};
    for (const mime of Object.keys(bundle)) {
      if (MIMES[mime]) shown[MIMES[mime]] = bundle[mime];
      else (shown.extra = shown.extra || {})[mime] = bundle[mime];
    }
  }
  if (shown.text === undefined) shown.text = util.inspect(value);
  if (value !== null && typeof value === 'object' && typeof rich !== 'function') {
    const prototype = Object.getPrototypeOf(value);
    if (Array.isArray(value) || prototype === null || prototype === Object.prototype) {
      try {
        const text = JSON.stringify(value);
        if (text !== undefined && text.length <= MOST_TEXT) shown.json = JSON.parse(text);
      } catch (error) { /* a cycle, or a BigInt */ }
    }
  }
  for (const name of Object.keys(shown)) if (typeof shown[name] === 'string') shown[name] = cut(shown[name]);
  return shown;
}

function failed(error) {
  let name = 'Error', value = '', stack = '';
  try {
    if (interrupted) [name, value] = ['KeyboardInterrupt', ''];
    else if (error !== null && typeof error === 'object' && 'message' in error) {
      name = String(error.name || 'Error');
      value = String(error.message);
      stack = String(error.stack || '').split('\n').filter((line) => !/node:|ringfence|<anonymous>:\d/.test(line)).join('\n');
    } else value = util.inspect(error);
  } catch (ignored) { /* an error that can't be read */ }
  say('error', { name: cut(name), value: cut(value), traceback: cut(stack || `${name}: ${value}`) + '\n' });
}

globalThis.require = require('module').createRequire(process.cwd() + '/cell.js');
globalThis.display = (...values) => values.forEach((value) => say('result', Object.assign({ main: false }, represent(value))));
for (const name of ['uncaughtException', 'unhandledRejection']) {
  process.on(name, (error) => process.stderr.write(`Uncaught ${util.inspect(error)}\n`));
}
let finish = null;
process.on('SIGINT', () => {
  if (interrupted === false && finish) {
    interrupted = true;
    finish(new Error('interrupted'));
  }
});

const loader = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
function script(code) {
  const options = { filename: `cell ${count}` };
  if (loader) options.importModuleDynamically = loader;
  return new vm.Script(code, options);
}

function compiles(code) {
  try {
    new vm.Script(code);
    return true;
  } catch (error) {
    return false;
  }
}

// The names that a piece of code declares, as far as a look at its words can tell; wrong ones do no harm.
function declared(code) {
  const names = new Set();
  for (const found of code.matchAll(/(?:^|[;\n])\s*(?:const|let|var)\s+([\w$]+|\{[^=]*\}|\[[^=]*\])\s*=/g)) {
    for (const name of found[1].matchAll(/(?:^|[{,[])\s*(?:\.\.\.)?(?:[\w$]+\s*:\s*)?([A-Za-z_$][\w$]*)/g)) names.add(name[1]);
  }
  for (const found of code.matchAll(/(?:^|[;\n])\s*(?:async\s+)?(?:function\s*\*?|class)\s+([A-Za-z_$][\w$]*)/g)) names.add(found[1]);
  return [...names];
}

// Code with await: in a function, whose names become variables of the context afterwards. It begins when vm has let go
// of SIGINT again, which would lose one that comes as the first part ends; so a loop in it can't be interrupted.
function wrapped(code) {
  let head = code, tail = 'undefined';
  for (let at = code.length, tries = 0; at >= 0 && tries < 200; at = Math.max(code.lastIndexOf(';', at - 1), code.lastIndexOf('\n', at - 1)), tries++) {
    const rest = code.slice(at + 1);
    if (rest.trim() && compiles(`(async () => (\n${rest}\n))`) && compiles(`(async () => {${code.slice(0, at + 1)}\n})`)) {
      [head, tail] = [code.slice(0, at + 1), rest];
      break;
    }
    if (at === 0) break;
  }
  if (head === code && compiles(`(async () => (\n${code}\n))`)) [head, tail] = ['', code];
  const keep = declared(head).map((name) => `try { __ringfence_keep[${JSON.stringify(name)}] = ${name} } catch (e) {}`);
  return `(async () => { await null; ${head}\n; const __ringfence_value = (\n${tail}\n); ${keep.join(';')}; return [__ringfence_value] })()`;
}

function keep(names) {
  globalThis.__ringfence_keep = names;
  for (const name of Object.keys(names)) {
    for (const code of [`var ${name} = __ringfence_keep.${name}`, `${name} = __ringfence_keep.${name}`]) {
      try {
        new vm.Script(code).runInThisContext();
        break;
      } catch (error) { /* a name that was declared by let or const before */ }
    }
  }
  delete globalThis.__ringfence_keep;
}

async function evaluate(code) {
  let made, waits = false;
  if (/^\s*\{/.test(code) && compiles(`(${code.replace(/;\s*$/, '')}\n)`)) code = `(${code.replace(/;\s*$/, '')}\n)`;
  try {
    made = script(code);
  } catch (error) {
    const other = /\bawait\b/.test(code) ? wrapped(code) : '';
    if (!other || !compiles(other)) throw error;
    made = script(other);
    waits = true;
  }
  const names = globalThis.__ringfence_keep = {};
  const value = made.runInThisContext({ breakOnSigint: true, displayErrors: false });
  delete globalThis.__ringfence_keep;
  if (!waits) return [value];
  globalThis.__ringfence_keep = names;
  try {
    return await Promise.race([value, new Promise((_, reject) => { finish = reject; })]);
  } finally {
    keep(names);
  }
}

async function run(request) {
  call = String(request.x);
  count += 1;
  say('start', { n: count });
  const saved = {};
  for (const name of Object.keys(request.env || {})) {
    saved[name] = process.env[name];
    process.env[name] = String(request.env[name]);
  }
  interrupted = false;
  try {
    const [value] = await evaluate(String(request.code));
    if (value !== undefined && !/;\s*$/.test(request.code)) say('result', Object.assign({ main: true }, represent(value)));
  } catch (error) {
    if (error && error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED') interrupted = true;
    failed(error);
  }
  finish = null;
  interrupted = null;
  for (const name of Object.keys(saved)) {
    if (saved[name] === undefined) delete process.env[name];
    else process.env[name] = saved[name];
  }
  await new Promise(setImmediate); // what was printed on the way out
  say('end', { n: count });
}

const parts = {};
let held = '', queue = Promise.resolve();
const source = new net.Socket({ fd: 4, readable: true, writable: false });
source.setEncoding('utf8');
source.on('data', (text) => {
  held += text;
  for (let at; (at = held.indexOf('\n')) >= 0;) {
    let request;
    const line = held.slice(0, at);
    held = held.slice(at + 1);
    try {
      request = JSON.parse(line);
      if (request.op === 'part' || request.op === 'last') {
        parts[request.x] = (parts[request.x] || '') + request.d;
        if (request.op === 'part') continue;
        const whole = parts[request.x];
        delete parts[request.x];
        request = JSON.parse(whole);
      }
    } catch (error) {
      continue;
    }
    if (request && request.op === 'run') queue = queue.then(() => run(request)).catch(() => {});
  }
});
source.on('end', () => queue.then(() => process.exit(0)));
say('ready', { version: process.version });
