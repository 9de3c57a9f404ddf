// The search runs in a web worker, which browsers refuse on pages opened as files. It then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const address = new URL(url, location.href)
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      this.inside = new Promise((resolve, reject) => {
        const load = (source) => new Promise((done, failed) => {
          const script = inside.document.createElement("script")
          script.src = new URL(source, address)
          script.onload = done
          script.onerror = () => failed(new Error(`${source} cannot be loaded`))
          inside.document.body.append(script)
        })
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
        load(address).then(() => resolve(inside), reject)
      })
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
